"""``weightlane report``: one page of HTML about a run or a service, as a file or live."""
