"""Growing arrays of fixed-size records, on disk or in memory."""
