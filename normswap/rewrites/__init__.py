"""One file for each rewrite; each makes a `Plan`."""
