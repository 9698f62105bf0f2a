"""Replays the recording of a step on a machine: overlap, exposed communication, host limits."""
