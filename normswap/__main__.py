"""`python -m normswap` is the `normswap` command."""

from normswap.cli import main

if __name__ == "__main__":
    main()
