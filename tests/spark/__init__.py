"""Spark's source and sink against a real Spark."""
