"""What a job communicated, from the records that its ranks wrote: `echelon trace DIR`."""
