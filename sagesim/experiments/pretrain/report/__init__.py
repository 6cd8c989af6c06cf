"""The report that compares runs: statistics, charts, tables and the HTML page."""
