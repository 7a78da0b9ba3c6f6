"""A choice in, entries out: slots, staging, reads ahead and writes behind."""
