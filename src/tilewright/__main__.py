"""`python -m tilewright` is the `tilewright` command."""

from tilewright.cli.main import main

if __name__ == "__main__":
    main()
