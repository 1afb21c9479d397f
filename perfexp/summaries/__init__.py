"""Texts and small tables about records, shared by reports, tables, plots, and tracking."""
