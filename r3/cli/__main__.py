"""`python -m r3.cli`, for where the console script is not on the PATH."""

from r3.cli import main

if __name__ == "__main__":
    main()
