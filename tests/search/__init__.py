"""Tests of autoplan.search."""
