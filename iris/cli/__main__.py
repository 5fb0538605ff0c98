"""`python -m iris.cli`: run the `iris` command without having it on the PATH."""

from iris.cli import main

if __name__ == "__main__":
    main()
