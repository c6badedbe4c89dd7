"""The version of Windlass. Read here, not from the installed distribution, which a checkout may lack."""

__version__ = "0.1.0"
