"""`python -m vitrail`, and so `torchrun -m vitrail`."""

from vitrail.cli import main

if __name__ == "__main__":
    main()
