"""Text reports: the console and report.md."""
