"""The interfaces of other packages over this one's ops, so that a caller changes one import."""
