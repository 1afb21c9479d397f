"""Tables: records and sweeps as CSV, Parquet and JSON."""
