//! Plots as SVG text: axes, lines and stacked areas.

use std::fmt::Write as _;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 42.0;

/// Mapping of values to positions on an axis.
#[derive(Debug, Clone, Copy)]
pub enum AxisScale {
    /// Linear from the first value to the second.
    Linear(f64, f64),
    /// Logarithmic; both ends are above 0.
    Log(f64, f64),
}

impl AxisScale {
    /// 0 at the low end, 1 at the high end; values outside are clamped.
    fn place(self, value: f64) -> f64 {
        let share = match self {
            AxisScale::Linear(low, high) => (value - low) / (high - low),
            AxisScale::Log(low, high) => (value.max(low) / low).ln() / (high / low).ln(),
        };
        if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
    }

    fn ticks(self) -> Vec<f64> {
        match self {
            AxisScale::Linear(low, high) => {
                let step = round_step((high - low) / 6.0);
                let first = (low / step).ceil();
                (0..=12)
                    .map(|position| (first + f64::from(position)) * step)
                    .take_while(|tick| *tick <= high * 1.000_001)
                    .collect()
            }
            AxisScale::Log(low, high) => {
                let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
                let ticks = decades.flat_map(|decade| [1.0, 3.0].map(|digit| digit * 10_f64.powi(decade)));
                ticks.filter(|tick| (low..=high).contains(tick)).collect()
            }
        }
    }
}

/// The next 1, 2 or 5 times a power of ten.
fn round_step(step: f64) -> f64 {
    if !(step.is_finite() && step > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf(step.log10().floor());
    let digit = [1.0, 2.0, 5.0, 10.0].into_iter().find(|digit| digit * power >= step).unwrap_or(10.0);
    digit * power
}

#[derive(Debug)]
pub struct SvgPlot {
    x: AxisScale,
    y: AxisScale,
    body: String,
}

impl SvgPlot {
    /// An empty plot with the names of its axes.
    pub fn new(x: AxisScale, y: AxisScale, (x_name, y_name): (&str, &str)) -> Self {
        let mut plot = Self { x, y, body: String::new() };
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        for tick in y.ticks() {
            let position = plot.y_at(tick);
            let label = number(tick);
            let _ = write!(
                plot.body,
                "<path class='grid' d='M{LEFT} {position:.1}H{right}'/>\
                 <text class='tick' x='{:.1}' y='{:.1}' text-anchor='end'>{label}</text>",
                LEFT - 6.0,
                position + 4.0
            );
        }
        for tick in x.ticks() {
            let position = plot.x_at(tick);
            let label = number(tick);
            let _ = write!(
                plot.body,
                "<path class='grid' d='M{position:.1} {bottom}v4'/>\
                 <text class='tick' x='{position:.1}' y='{:.1}' text-anchor='middle'>{label}</text>",
                bottom + 18.0
            );
        }
        let middle = f64::midpoint(LEFT, right);
        let _ = write!(
            plot.body,
            "<path class='axis' d='M{LEFT} {bottom}H{right}'/>\
             <text class='name' x='{middle:.1}' y='{:.1}' text-anchor='middle'>{x_name}</text>\
             <text class='name' transform='translate(14 {:.1}) rotate(-90)' text-anchor='middle'>{y_name}</text>",
            HEIGHT - 4.0,
            f64::midpoint(TOP, bottom)
        );
        plot
    }

    fn x_at(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT)
    }

    fn y_at(&self, value: f64) -> f64 {
        HEIGHT - BOTTOM - self.y.place(value) * (HEIGHT - TOP - BOTTOM)
    }

    /// Adds a line through `points` with a name that is shown on hovering.
    pub fn line(&mut self, points: &[(f64, f64)], class: &str, name: &str) {
        let path = self.path(points);
        let _ = write!(self.body, "<path class='line {class}' d='{path}'><title>{name}</title></path>");
    }

    /// Adds the area between two lines over the same x.
    pub(crate) fn area(&mut self, lower: &[(f64, f64)], upper: &[(f64, f64)], class: &str, name: &str) {
        let mut points = upper.to_vec();
        points.extend(lower.iter().rev());
        let path = self.path(&points);
        let _ = write!(self.body, "<path class='area {class}' d='{path}Z'><title>{name}</title></path>");
    }

    fn path(&self, points: &[(f64, f64)]) -> String {
        let mut path = String::new();
        for (position, &(x, y)) in points.iter().enumerate() {
            let letter = if position == 0 { 'M' } else { 'L' };
            let _ = write!(path, "{letter}{:.1} {:.1}", self.x_at(x), self.y_at(y));
        }
        path
    }

    /// Adds the names of the lines, each with its class, in the upper left corner.
    pub fn legend(&mut self, lines: &[(String, &str)]) {
        for (position, (class, name)) in lines.iter().enumerate() {
            let y = TOP + 14.0 + 17.0 * position as f64;
            let _ = write!(
                self.body,
                "<path class='line {class}' d='M{:.1} {:.1}h22'/><text class='name' x='{:.1}' y='{y:.1}'>{name}</text>",
                LEFT + 14.0,
                y - 4.0,
                LEFT + 44.0
            );
        }
    }

    /// A stand-alone file, with the style that its classes need.
    pub fn file(&self, label: &str, style: &str) -> String {
        format!(
            "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-family='sans-serif'><title>{label}</title>\
             <style>{style}</style><rect class='paper' width='{WIDTH}' height='{HEIGHT}'/>{}</svg>\n",
            self.body
        )
    }

    /// The `<svg>` element as text.
    pub(crate) fn svg(&self, label: &str) -> String {
        format!("<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' aria-label='{label}'>{}</svg>", self.body)
    }
}

fn number(value: f64) -> String {
    if value.abs() >= 10_000.0 {
        format!("{:.0}k", value / 1_000.0)
    } else {
        let text = format!("{value:.3}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(AxisScale::Linear(0.0, 1.0).ticks(), [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]);
        assert_eq!(AxisScale::Log(0.1, 30.0).ticks(), [0.1, 0.30000000000000004, 1.0, 3.0, 10.0, 30.0]);
        assert!(AxisScale::Linear(5.0, 5.0).ticks().len() <= 13);
    }

    #[test]
    fn nothing_is_drawn_outside() {
        let mut plot = SvgPlot::new(AxisScale::Linear(0.0, 10.0), AxisScale::Linear(0.0, 1.0), ("x", "y"));
        plot.line(&[(-5.0, 0.0), (f64::NAN, 9.0)], "c", "n");
        assert!(plot.svg("p").contains("d='M56.0 258.0L56.0 12.0'"), "{}", plot.svg("p"));
    }
}
