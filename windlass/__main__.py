"""`python -m windlass`: the command without the console script."""

from windlass.cli.entry import main

main()
