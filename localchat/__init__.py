"""localchat: talk to a large language model on your own desk."""

__version__ = "0.1.0"
