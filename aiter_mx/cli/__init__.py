"""The command line, `aiter-mx`."""
