"""Adapters that put this package's ops under the layers of other packages, one file each."""
