"""Functional ops and the framework modules on them."""
