"""`python -m windlass.cli`, for where the console script is not on the path."""

from windlass.cli.entry import main

main()
