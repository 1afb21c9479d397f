"""Summaries: texts and small tables about records, for reports, tables, plots and tracking."""
