//! Integers or percentages.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// Kubernetes' `IntOrString`, as used for numbers of replicas: `3` or `"30%"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum IntOrPercent {
    Int(i32),
    /// A percentage with its sign, as written; other text has no value.
    Text(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoundingMode {
    Down,
    Up,
}

impl IntOrPercent {
    /// The number, or that percentage of `total`. `None` for text that is no percentage.
    #[must_use]
    pub fn of(&self, total: i32, round: RoundingMode) -> Option<i32> {
        let percent = match self {
            Self::Int(count) => return Some(*count),
            Self::Text(_) => i64::from(self.percent()?),
        };
        let share = percent * i64::from(total);
        let rounded = match round {
            RoundingMode::Down => share.div_euclid(100),
            RoundingMode::Up => -(-share).div_euclid(100),
        };
        Some(i32::try_from(rounded).unwrap_or(i32::MAX))
    }

    /// The percentage; `None` for numbers and other text.
    #[must_use]
    pub fn percent(&self) -> Option<i32> {
        match self {
            Self::Int(_) => None,
            Self::Text(text) => text.strip_suffix('%')?.parse().ok(),
        }
    }
}

impl JsonSchema for IntOrPercent {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "IntOrPercent".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        crate::schema::int_or_string(generator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_are_rounded_by_the_mode() {
        let percent = |text: &str| IntOrPercent::Text(text.into());
        assert_eq!(percent("30%").of(7, RoundingMode::Up), Some(3));
        assert_eq!(percent("30%").of(7, RoundingMode::Down), Some(2));
        assert_eq!(percent("0%").of(7, RoundingMode::Up), Some(0));
        assert_eq!(percent("200%").of(i32::MAX, RoundingMode::Up), Some(i32::MAX));
        assert_eq!(IntOrPercent::Int(4).of(7, RoundingMode::Up), Some(4));
        assert_eq!(percent("4").of(7, RoundingMode::Up), None);
        assert_eq!(percent("x%").of(7, RoundingMode::Up), None);
    }
}
