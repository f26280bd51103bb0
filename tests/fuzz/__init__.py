"""Fuzzing `attention` over all its arguments: every call is right, within bounds known beforehand, or refused."""
