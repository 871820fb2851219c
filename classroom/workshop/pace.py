"""``beyond class pace``: clock times of a lesson, by section, or of a whole track."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from classroom.authoring import plans
from course_lib.notebook import contents
from course_tools.command_line import ArgumentParser, reports_errors


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Print the clock times. Returns 1 when the time does not suffice, 2 for bad input."""
    tracks = plans.tracks()
    parser = ArgumentParser(
        prog="beyond class pace", description="Clock times of a lesson or a track, and what to skip."
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("lesson", type=int, nargs="?", help="1 to 8")
    what.add_argument("--track", choices=list(tracks), help="all of a track, with its breaks")
    parser.add_argument("--minutes", type=int, help="what you have for the lesson, without its lab")
    parser.add_argument("--start", metavar="HH:MM", type=time_of_day, default="09:00", help="default: 09:00")
    options = parser.parse_args(argv)
    if options.track:
        return of_track(tracks[options.track], options.start)
    contents.find(options.lesson, "lessons")
    return of_lesson(contents.map_rows()[options.lesson - 1], options.minutes, options.start)


def time_of_day(text: str) -> datetime:
    """'9:30' as a time of some day."""
    return datetime.strptime(text, "%H:%M")


def of_lesson(row: contents.MapRow, limit: int | None, now: datetime) -> int:
    """Print a lesson and its lab, from `now` on. Returns 1 where the lesson takes more than `limit` minutes."""
    steps, core = plans.lesson(row, limit), plans.note(row.number).lab_core
    needed = plans.taken(steps)
    for step in steps:
        title = "  " * max(step.section.level - 2, 0) + step.section.title
        if step.skipped:
            print(f"  -       skip  {title}\n                 because {step.skipped}")
        else:
            print(f"{now:%H:%M}  {step.minutes:3} min  {title}")
            now += timedelta(minutes=step.minutes)
    print(f"{now:%H:%M}  the end, after {needed} of the lesson's {row.minutes} minutes")
    if limit is not None and needed > limit:
        print(f"{needed - limit} minutes too long, with all skipped that the note names.")
    print(f"\nThe lab, {row.lab_minutes} minutes; * its core, {plans.core_minutes(row)} minutes:")
    for exercise in row.exercises:
        mark = "*" if exercise.title in core else " "
        print(f"{now:%H:%M}  {exercise.minutes:3} min  {mark} {exercise.title} (difficulty {exercise.difficulty} of 5)")
        now += timedelta(minutes=exercise.minutes)
    return int(limit is not None and needed > limit)


def of_track(track: plans.Track, start: datetime) -> int:
    """Print each session of a track. Returns 1 where one takes more than the track's minutes."""
    end, fits = start + timedelta(minutes=track.minutes), True
    print(f"{track.title}. {track.who}")
    for number, parts in enumerate(track.sessions, 1):
        print(f"\n{track.session.capitalize()} {number}")
        now = start
        for part in parts:
            kind = "" if part.kind == "pause" else f"{part.kind.capitalize()}: "
            print(f"{now:%H:%M}  {part.minutes:3} min  {kind}{part.title}")
            for title in part.dropped:
                print(f"                 run, but skip: {title}")
            now += timedelta(minutes=part.minutes)
        print(f"{now:%H:%M}  the end, planned for {end:%H:%M}{'' if now <= end else ': TOO LONG'}")
        fits = fits and now <= end
    return int(not fits)
