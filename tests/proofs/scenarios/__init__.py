"""What the proofs run at large counts and the tests at small ones: functions that are given a count, and a seed
where they draw.
"""
