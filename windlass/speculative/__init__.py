"""Ways to guess the next tokens, and how many guesses are worth verifying."""
