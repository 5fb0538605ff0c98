"""Scenarios that proofs run at large counts and tests at small ones: functions with a count, and a seed if they draw
at random.
"""
