"""Histories: members that write down their calls and events, and a checker that shares no code with Iris."""
