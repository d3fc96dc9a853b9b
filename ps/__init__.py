"""Parameter servers, coordinator and what both sides share."""
