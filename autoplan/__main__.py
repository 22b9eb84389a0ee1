"""`python -m autoplan` is the command line."""

from autoplan.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
