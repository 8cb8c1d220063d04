"""Registrations for frameworks that have a registry: one module for each, which imports its framework when called."""
