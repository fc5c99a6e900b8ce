"""What differentiates what: operators of torch, their Functions and batching rules; no arithmetic."""
