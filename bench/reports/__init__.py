"""The parts of `report.py`: checked results, tables, plots and the page."""
