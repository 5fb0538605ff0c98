"""Histories: members that write down what they did and were told, and a checker that shares no code with Iris."""
