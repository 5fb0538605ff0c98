"""What `report.py` is made of: the results as they were read, their tables, plots and page."""
