"""``python -m aiter_mx.cli``, for checkouts that are not installed."""

from aiter_mx.cli.main import main

if __name__ == "__main__":  # processes of a pool import this too
    main()
