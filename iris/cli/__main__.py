"""`python -m iris.cli`: the `iris` command where it is not on the PATH."""

from iris.cli import main

if __name__ == "__main__":
    main()
