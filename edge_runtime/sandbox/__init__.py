"""Child processes for work that may crash, hang or eat memory: start, confine, bound, feed and judge them."""
