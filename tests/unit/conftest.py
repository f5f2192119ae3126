"""Settings of the unit tests."""

from hypothesis import settings

# How long an example takes says nothing here: machines are shared, and no test is timed.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
