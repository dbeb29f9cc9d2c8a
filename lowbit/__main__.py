"""`python -m lowbit` is the `lowbit` command."""

from lowbit.cli.main import main

if __name__ == "__main__":
    main()
