"""Contexts that outlive the process: saved, opened, forked; what they belong to and how they are kept."""
