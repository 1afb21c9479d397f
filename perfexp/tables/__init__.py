"""CSV and Parquet tables of records and sweeps."""
