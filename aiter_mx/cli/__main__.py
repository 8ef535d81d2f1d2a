"""``python -m aiter_mx.cli``, for checkouts that are not installed."""

from aiter_mx.cli.main import main

main()
