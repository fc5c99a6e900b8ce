"""In which order the steps of a chain are computed, and what that costs."""
