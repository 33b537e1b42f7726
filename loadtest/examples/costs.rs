//! Plots columns of a Markdown table over its first column, on a logarithmic scale.
//!
//! `cargo run -p moongate-loadtest --example costs -- TABLE.md FILE.svg COLUMN…`

use anyhow::{Context as _, ensure};
use moongate_loadtest::simulate::{AxisScale, SvgPlot};

const STYLE: &str = "\
:root{--ink:#667085;--grid:#e4e7ec;--paper:#fff;--c0:#2563eb;--c1:#d97706;--c2:#059669}\
@media(prefers-color-scheme:dark){:root{--ink:#98a2b3;--grid:#2b3340;--paper:#12161d;--c0:#60a5fa;--c1:#fbbf24;--c2:#34d399}}\
.grid{stroke:var(--grid);fill:none}.axis{stroke:var(--ink);fill:none}.tick{font-size:11px;fill:var(--ink)}\
.name{font-size:12px;fill:var(--ink)}.paper{fill:var(--paper)}.line{fill:none;stroke-width:1.8}\
.k0{stroke:var(--c0)}.k1{stroke:var(--c1)}.k2{stroke:var(--c2)}";
const COLOURS: usize = 3;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (table, file) =
        arguments.next().zip(arguments.next()).context("usage: costs TABLE.md FILE.svg COLUMN…")?;
    let columns: Vec<String> = arguments.collect();
    let text = std::fs::read_to_string(&table).with_context(|| table.clone())?;
    Ok(std::fs::write(file, plot(&text, &columns)?)?)
}

fn plot(table: &str, columns: &[String]) -> anyhow::Result<String> {
    let mut rows = table.lines().filter(|line| line.starts_with('|')).map(cells);
    let names = rows.next().context("the file has no table")?;
    let rows: Vec<Vec<f64>> = rows
        .filter(|row| row[0].chars().any(|character| character.is_ascii_digit()))
        .map(|row| row.iter().map(|cell| cell.replace(',', "").parse().unwrap_or(f64::NAN)).collect())
        .collect();
    ensure!(rows.len() >= 2, "the table has fewer than two rows");
    let mut lines = Vec::new();
    for column in columns {
        let at = names.iter().position(|name| name == column);
        let at = at.with_context(|| format!("the table has no column `{column}`, but {names:?}"))?;
        let points = rows.iter().filter_map(|row| Some((*row.first()?, *row.get(at)?)));
        lines.push(points.filter(|(x, y)| x.is_finite() && y.is_finite()).collect::<Vec<_>>());
    }
    let all = || lines.iter().flatten();
    let (least, most) =
        all().fold((f64::MAX, 0.0_f64), |(least, most), (x, _)| (least.min(*x), most.max(*x)));
    let highest = all().map(|(_, y)| *y).fold(0.0, f64::max);
    let name = columns.first().map_or("", String::as_str);
    let axes = (names[0].as_str(), name);
    let mut plot = SvgPlot::new(AxisScale::Log(least, most), AxisScale::Linear(0.0, 1.1 * highest), axes);
    let classes: Vec<(String, &str)> = columns
        .iter()
        .enumerate()
        .map(|(number, name)| (format!("k{}", number % COLOURS), name.as_str()))
        .collect();
    for (points, (class, name)) in lines.iter().zip(&classes) {
        plot.line(points, class, name);
    }
    if columns.len() > 1 {
        plot.legend(&classes);
    }
    Ok(plot.file(&format!("{} by {}", columns.join(" and "), names[0]), STYLE))
}

fn cells(row: &str) -> Vec<String> {
    row.trim().trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
}
