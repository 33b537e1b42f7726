//! Questions of the API server, and their answers: `ConversionReview` of `apiextensions.k8s.io/v1`, `AdmissionReview` of
//! `admission.k8s.io/v1`.

use std::fmt::Display;

use kube::core::Status;
use kube::core::conversion::{ConversionRequest, ConversionResponse, ConversionReview};
use kube::core::gvk::GroupVersionKind;
use rbg_api::conversion::{ConversionError, Version, convert};
use serde::Deserialize;
use serde_json::{Value, json};

/// A body that asks nothing.
#[derive(Debug, thiserror::Error)]
#[error("the body is no {0}: {1}")]
pub(super) struct Rubbish(&'static str, String);

impl Rubbish {
    fn of(what: &'static str) -> impl Fn(serde_json::Error) -> Self {
        move |error| Self(what, error.to_string())
    }
}

/// All objects of the review in the version that it asks for, or none; and which of the two, in one word.
pub(super) fn converted(body: &[u8]) -> Result<(&'static str, ConversionReview), Rubbish> {
    let review: ConversionReview = serde_json::from_slice(body).map_err(Rubbish::of("ConversionReview"))?;
    let request = ConversionRequest::from_review(review);
    let mut request = request.map_err(|error| Rubbish("ConversionReview", error.to_string()))?;
    let objects = std::mem::take(&mut request.objects);
    let all = Version::parse(&request.desired_api_version)
        .ok_or_else(|| ConversionError::Version(request.desired_api_version.clone()))
        .and_then(|version| objects.iter().map(|object| convert(object, version)).collect());
    let response = ConversionResponse::for_request(request);
    let (answer, response) = match all {
        Ok(objects) => ("converted", response.success(objects)),
        Err(error) => {
            tracing::warn!(%error, "an object cannot be converted");
            ("refused", response.failure(Status::failure(&error.to_string(), "BadRequest")))
        }
    };
    Ok((answer, response.into_review()))
}

/// What is to be judged.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Question {
    uid: String,
    /// Kind of both objects.
    pub(super) kind: GroupVersionKind,
    /// Where they are.
    #[serde(default)]
    pub(super) namespace: String,
    /// As it shall be.
    #[serde(default)]
    pub(super) object: Value,
    /// As it was; null if it is new.
    #[serde(default)]
    pub(super) old_object: Value,
}

impl Question {
    /// The question of an `AdmissionReview`.
    pub(super) fn of(body: &[u8]) -> Result<Self, Rubbish> {
        #[derive(Deserialize)]
        struct Review {
            request: Question,
        }
        let review: Review = serde_json::from_slice(body).map_err(Rubbish::of("AdmissionReview"))?;
        Ok(review.request)
    }

    /// The answer: yes, or no for these reasons.
    pub(super) fn answered<T: Display>(&self, objections: &[T]) -> Value {
        let mut response = json!({ "uid": self.uid, "allowed": objections.is_empty() });
        if !objections.is_empty() {
            let texts: Vec<String> = objections.iter().map(T::to_string).collect();
            response["status"] =
                json!({ "status": "Failure", "reason": "Invalid", "code": 422, "message": texts.join("; ") });
        }
        json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response })
    }
}
