"""Language models whose layers are split over the processes of a group, advanced a step at a time."""
