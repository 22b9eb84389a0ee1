"""Device and link profiles."""
