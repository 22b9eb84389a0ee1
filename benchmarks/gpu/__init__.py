"""Plans on one GPU: predicted against measured; see README.md."""
