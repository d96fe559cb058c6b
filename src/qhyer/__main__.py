"""`python -m qhyer` is `qhyer`."""

from qhyer.cli import main

if __name__ == "__main__":
    main()
