//! The current time in templates.

use minijinja::{Error, ErrorKind};

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A point in time in the engines' time zone, since templates print local dates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TemplateTime {
    local_seconds: i64,
}

impl TemplateTime {
    /// Seconds since 1970, for engines in the time zone UTC, the default of containers.
    #[must_use]
    pub fn utc(seconds: i64) -> TemplateTime {
        TemplateTime::local(seconds, 0)
    }

    /// Seconds since 1970, and the UTC offset of the engines in seconds.
    #[must_use]
    pub fn local(seconds: i64, ahead: i32) -> TemplateTime {
        TemplateTime { local_seconds: seconds.saturating_add(ahead.into()) }
    }

    /// C's `strftime` in the C locale, without directives that templates do not use.
    pub(super) fn strftime(self, format: &str) -> Result<String, Error> {
        let days = self.local_seconds.div_euclid(86_400);
        let second = self.local_seconds.rem_euclid(86_400);
        let (year, month, day) = civil(days);
        let weekday = DAYS[usize::try_from((days + 4).rem_euclid(7)).unwrap_or_default()];
        let name = MONTHS[usize::try_from(month - 1).unwrap_or_default()];
        let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
        let mut out = String::new();
        let mut rest = format.chars();
        while let Some(character) = rest.next() {
            if character != '%' {
                out.push(character);
                continue;
            }
            let mut directive = rest.next();
            let bare = directive == Some('-');
            if bare {
                directive = rest.next();
            }
            let two = |number: i64| if bare { number.to_string() } else { format!("{number:02}") };
            out.push_str(&match directive {
                Some('Y') => year.to_string(),
                Some('y') => two(year.rem_euclid(100)),
                Some('m') => two(month),
                Some('d') => two(day),
                Some('e') => format!("{day:2}"),
                Some('B') => name.to_owned(),
                Some('b' | 'h') => name[..3].to_owned(),
                Some('A') => weekday.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('H') => two(hour),
                Some('I') => two((hour + 11) % 12 + 1),
                Some('M') => two(minute),
                Some('S') => two(second),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('F') => format!("{year}-{month:02}-{day:02}"),
                Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
                Some('%') => "%".to_owned(),
                other => {
                    let problem = format!("strftime_now: {other:?} is not supported");
                    return Err(Error::new(ErrorKind::InvalidOperation, problem));
                }
            });
        }
        Ok(out)
    }
}

/// Year, month and day of the proleptic Gregorian calendar, from days since 1970-01-01. Years start in March, so that the
/// leap day is the last day of a year.
fn civil(days: i64) -> (i64, i64, i64) {
    let since = days + 719_468;
    let era = since.div_euclid(146_097);
    let day_of_era = since.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_formatted_as_by_strftime() {
        let show = |seconds| {
            TemplateTime::utc(seconds).strftime("%A %a %Y-%m-%d %-d %e %B %b %H:%M:%S %I%p %y").unwrap()
        };
        assert_eq!(show(0), "Thursday Thu 1970-01-01 1  1 January Jan 00:00:00 12AM 70");
        assert_eq!(show(951_827_696), "Tuesday Tue 2000-02-29 29 29 February Feb 12:34:56 12PM 00");
        assert_eq!(show(1_795_255_200), "Saturday Sat 2026-11-21 21 21 November Nov 10:00:00 10AM 26");
        assert_eq!(TemplateTime::local(0, -3600).strftime("%F %T %%").unwrap(), "1969-12-31 23:00:00 %");
        assert!(TemplateTime::utc(0).strftime("%Q").is_err());
        assert!(TemplateTime::utc(0).strftime("%").is_err());
    }
}
